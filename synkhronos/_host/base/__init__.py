"""Modules that both host libraries share, written once.

    theano/library.py, pytensor/library.py ──▶ base.library ──▶ the modules of this folder
    base/host.py, and theano/host.py or pytensor/host.py ──▶ synkhronos._host

`library` has the classes and functions of the host library of this process under the same names,
whichever it is. The folder of each library keeps what differs in more than names.
"""
