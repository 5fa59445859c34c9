//! What PyTorch writes: `torch.save` archives (zip, and the older bare pickles) and the metadata of
//! distributed checkpoints. Pickles are read as recorded calls of listed names; nothing is run.

mod dcp;
mod dtype;
mod legacy;
mod names;
mod numpy;
mod tensor;
mod typed;
pub mod zip;

pub use dcp::{DcpChunk, DcpItem, DcpMetadata, METADATA_BYTES_MAX, Place, dcp_metadata};
pub use dtype::{Stored, storage_dtype, stored};
pub use legacy::{HEAD_BYTES_MAX, Legacy, is_legacy, legacy};
pub use names::NAMES;
pub use numpy::ArrayRef;
pub use tensor::{StorageRef, TensorRef, storage_element, tensor_of};
pub use typed::{Key, Leaves, NoTensors, key_json, path_json, text_json, typed_json};

#[cfg(test)]
mod tests;
