"""What is measured about a state."""
