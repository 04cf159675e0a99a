"""Networks and what is done to them."""
