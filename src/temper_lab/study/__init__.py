"""Studies: routing methods trained side by side under equal conditions."""
