"""What the routing does while a network runs."""
