//! What PyTorch writes: `torch.save` archives (zip, and the older bare pickles) and the metadata of
//! distributed checkpoints. Pickles are read as recorded calls of listed names; nothing is run.

mod dcp;
mod dtype;
mod legacy;
mod names;
mod numpy;
mod tensor;
mod typed;
mod write;
pub mod zip;
mod zip_write;

pub use dcp::{DcpChunk, DcpItem, DcpMetadata, METADATA_BYTES_MAX, Place, dcp_metadata};
pub use dtype::{Stored, storage_dtype, stored, torch_of};
pub use legacy::{HEAD_BYTES_MAX, Legacy, is_legacy, legacy};
pub use names::NAMES;
pub use numpy::ArrayRef;
pub use tensor::{StorageRef, TensorRef, storage_element, tensor_of};
pub use typed::{Key, Leaves, NoTensors, key_json, path_json, text_json, typed_json};
pub use write::{PickleWriter, TensorPickles, decode_key, is_tag, tensor_pickle};
pub use zip_write::ZipWriter;

#[cfg(test)]
mod tests;
