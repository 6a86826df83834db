"""The prims that `mem_pointwise` fuses, by kind."""

from __future__ import annotations

from thunder.core.prims import PrimIDs

__all__ = ["POINTWISE", "REDUCTIONS", "SHAPES", "VIEWS"]

VIEWS = frozenset(
    {
        PrimIDs.BROADCAST_IN_DIM,
        PrimIDs.RESHAPE,
        PrimIDs.SHALLOW_COPY,
        PrimIDs.SLICE,
        PrimIDs.SQUEEZE,
        PrimIDs.TRANSPOSE,
    }
)
SHAPES = frozenset({PrimIDs.CAT, PrimIDs.FULL, PrimIDs.IOTA, PrimIDs.PAD, PrimIDs.SHAPE}) | VIEWS
REDUCTIONS = frozenset({PrimIDs.AMAX, PrimIDs.AMIN, PrimIDs.PROD, PrimIDs.SUM, PrimIDs.VAR, PrimIDs.VAR_MEAN})
POINTWISE = frozenset(
    getattr(PrimIDs, name)
    for name in (
        # one operand
        *("ABS", "ACOS", "ACOSH", "ASIN", "ASINH", "ATAN", "ATANH", "BITWISE_NOT", "CEIL", "CLONE"),
        *("CONVERT_ELEMENT_TYPE", "COS", "COSH", "ERF", "ERFC", "ERFINV", "EXP", "EXP2", "EXPM1", "FLOOR"),
        *("ISFINITE", "LGAMMA", "LOG", "LOG10", "LOG1P", "LOG2", "NEG", "RECIPROCAL", "ROUND", "RSQRT"),
        *("SIGN", "SIGNBIT", "SIN", "SINH", "SQRT", "TAN", "TANH", "TRUNC"),
        # two and three
        *("ADD", "ATAN2", "BITWISE_AND", "BITWISE_LEFT_SHIFT", "BITWISE_OR", "BITWISE_RIGHT_SHIFT"),
        *("BITWISE_XOR", "DIV", "EQ", "FMOD", "GE", "GT", "LE", "LT", "MAXIMUM", "MINIMUM", "MUL", "NE"),
        *("NEXTAFTER", "POW", "REMAINDER", "SUB", "WHERE"),
    )
)
