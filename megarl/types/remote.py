"""A call to another process whose arguments travel as one object."""

from __future__ import annotations


class RemoteCall:
    """The arguments of a call to another process; a subclass is a frozen dataclass.

    The caller may put references to values in the object store (`at_arrival`) into its fields, and into lists in them.
    The method that is called gets the object with the values (`megarl.cluster.actor`, the only place that knows of
    both).
    """
