"""Work-arounds for old and new versions of other libraries: one module per library.

Each function says which versions it is for, so that it can be deleted when they are no longer supported. What a library
does is asked of the installed one, never concluded from its version number.
"""
