"""The commands of the command line, such as ``synkhronos bench``; and ``synk.advise``."""
