"""An extension of Sphinx: formulas as MathML, which browsers draw without a script or a network."""

from docutils.nodes import SkipNode
from latex2mathml.converter import convert


def _inline(translator, node):
    translator.body.append(convert(node.astext()))
    raise SkipNode


def _block(translator, node):
    formula = convert(node.astext(), display="block")
    translator.body.append(f'<div class="math">{formula}</div>\n')
    raise SkipNode


def setup(app):
    """Register the renderer, which ``html_math_renderer`` names."""
    app.add_html_math_renderer("mathml", (_inline, None), (_block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
