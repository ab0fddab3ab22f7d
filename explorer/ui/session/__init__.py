"""What one visitor's session is made of: backend, address, widgets, window, what is known."""
