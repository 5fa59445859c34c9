//! A store that fails on purpose, from a script or a seed.
