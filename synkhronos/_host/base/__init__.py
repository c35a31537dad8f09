"""Modules that both host libraries share, written once.

    theano/library.py, pytensor/library.py ──▶ base.chosen_library ──▶ the modules of this folder
    the modules of this folder, and those of theano/ or pytensor/ ──▶ synkhronos._host

`chosen_library` has the classes and functions of the host library of this process under the same
names, whichever it is. The folder of each library keeps what differs in more than names.
"""
