//! Integration tests in one binary (one link): contract suites, conformance, faults, style.

mod index;
