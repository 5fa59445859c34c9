//! Small reads of a source, with typed errors for what ends too early.

use bytes::Bytes;
use drivetrain_formats as formats;

use crate::error::{Error, Result};
use crate::memory::Buffer;
use crate::storage::ReadAt;

/// A range of a file that is read like a file: an archive inside another.
#[derive(Debug, Clone, Copy)]
pub struct Part<'a> {
    /// The file.
    pub file: &'a dyn ReadAt,
    /// First byte.
    pub start: u64,
    /// Number of bytes.
    pub bytes: u64,
}

impl<'a> Part<'a> {
    /// All of a file.
    pub fn whole(file: &'a dyn ReadAt) -> Self {
        Self { file, start: 0, bytes: file.meta().size_bytes }
    }

    /// Bytes `offset..offset + len`.
    pub async fn read(&self, offset: u64, len: u64) -> Result<Bytes> {
        let end = offset.checked_add(len).filter(|&end| end <= self.bytes);
        if end.is_none() {
            let found = format!("an end at {}", self.start + self.bytes);
            let expected = format!("{len} bytes");
            let advice = "the file is cut or damaged: copy it again";
            return Err(Error::corrupt(self.name(), self.start + offset, expected, found, advice));
        }
        let buffer = Buffer::heap(len as usize);
        Ok(self.file.read_at(self.start + offset, buffer).await?.into_bytes())
    }

    /// The file's name for messages.
    pub fn name(&self) -> &'a str {
        &self.file.meta().path
    }

    /// A parser's error with the file it is about.
    pub fn format(&self, source: formats::Error) -> Error {
        Error::Format { file: self.name().into(), source: Box::new(source) }
    }
}
