"""Which files of rules have no examples."""

collect_ignore = ["compatible/zoo"]  # model files: they import theanompi, as ranks do
