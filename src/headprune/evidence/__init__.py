"""Evidence: how much each head matters, measured on text by criteria."""
