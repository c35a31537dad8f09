"""What runs in processes of its own; some in Pythons that have another library, not Synkhronos."""
