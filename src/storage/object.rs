//! Object stores through the `object_store` crate.
