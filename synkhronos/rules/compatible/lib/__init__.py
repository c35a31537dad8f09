"""``theanompi.lib``: optimizers and the recorder."""
