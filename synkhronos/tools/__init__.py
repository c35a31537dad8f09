"""The commands of the command line: ``synkhronos info`` and ``synkhronos bench``."""
