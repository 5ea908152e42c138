"""Dataset formats, one folder each. A folder's ``__init__`` declares its :class:`Format` as ``FORMAT``.

- ``<name>/``: ``read`` and ``write`` of one format, and where they are long ``check``, ``merge``, ``files``
- ``format``: the interface of formats; ``registry``: the installed formats
- ``contents``, ``target``, ``report``, ``merging``, ``carrying``: data exchanged between formats and verbs

Other packages add formats by entry points of the group ``actshard.formats``.
"""

from actshard.base.codes import Code, Remark
from actshard.formats.contents import Contents, Evidence, Options
from actshard.formats.format import Format
from actshard.formats.registry import (
    asked,
    contents_of,
    described,
    detect,
    get,
    names,
    of_object,
    of_tokens,
    signs,
    written,
)

__all__ = [
    "Code",
    "Contents",
    "Evidence",
    "Format",
    "Options",
    "Remark",
    "asked",
    "contents_of",
    "described",
    "detect",
    "get",
    "names",
    "of_object",
    "of_tokens",
    "signs",
    "written",
]
