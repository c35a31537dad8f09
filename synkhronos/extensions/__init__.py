"""Ready-made parts for training; `import synkhronos` does not import them."""
