//! What a transform means, and its CPU kernels.
