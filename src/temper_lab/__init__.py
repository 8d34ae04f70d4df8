"""The lab around `temper`: commands, training and studies. `temper` never imports it."""
