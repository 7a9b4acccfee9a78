"""A module of which a shared library is missing."""

import ctypes

ctypes.CDLL("libnone.so.1")
