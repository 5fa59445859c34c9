//! Counters, spans, and where the time went.
