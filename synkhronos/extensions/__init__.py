"""Ready-made parts for training: imported by those who use them."""
