//! Order as arithmetic: the sample at position p of epoch e is a pure function of (seed, e, p).
