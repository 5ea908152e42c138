"""The formats, one folder each; a folder's ``__init__`` declares its :class:`Format` as ``FORMAT``.

- ``<name>/``: ``read``, ``write``, ``check``, ``merge``, ``columns``: what only this format knows
- ``format``: the interface that opening and the verbs use; ``registry``: which formats are installed
- ``contents``, ``target``, ``report``, ``merging``, ``carrying``: what formats and verbs hand to each other

A package adds a format by an entry point of the group ``actshard.formats``.
"""

from actshard.codes import Code, Remark
from actshard.formats.contents import Contents, Evidence, Options
from actshard.formats.format import Format
from actshard.formats.registry import asked, contents_of, detect, get, names, of_tokens, written

__all__ = [
    "Code",
    "Contents",
    "Evidence",
    "Format",
    "Options",
    "Remark",
    "asked",
    "contents_of",
    "detect",
    "get",
    "names",
    "of_tokens",
    "written",
]
