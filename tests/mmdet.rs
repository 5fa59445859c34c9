//! mmdet3d info files.
