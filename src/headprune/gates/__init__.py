"""Gates: trained on every head, to an exact count of open ones."""
