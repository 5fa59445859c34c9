//! A deterministic driving world in nuScenes layout.
