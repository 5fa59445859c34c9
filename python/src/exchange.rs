//! One-folder checkpoints for other programs: torch.distributed.checkpoint's storage plug-in, and
//! the reading of `torch.save` archives.

use drivetrain::Error;
use drivetrain::checkpoint::exchange::{self, Feed, Publication, Written};
use drivetrain::checkpoint::layout::{Chunk, Dtype, FileRecord, Piece, RAW_CODEC};
use drivetrain::checkpoint::rects::Rect;
use drivetrain::checkpoint::{self};
use drivetrain::storage::{OptionMap, StorageOptions, open_store};
use futures::FutureExt;
use futures::future::LocalBoxFuture;
use pyo3::prelude::*;

use crate::checkpoint::OpenStep;
use crate::errors::to_python;

fn raise(error: &Error) -> PyErr {
    Python::attach(|py| to_python(py, error))
}

fn storage(options: Option<OptionMap>) -> StorageOptions {
    StorageOptions { options: options.unwrap_or_default() }
}

/// path, dtype, shape, offsets, extent
type PieceRow = (String, String, Vec<i64>, Vec<i64>, Vec<i64>);
/// path, bytes, crc32c, header bytes, crc32c of the header, rank
type FileRow = (String, u64, String, u64, String, u32);
/// path, entry, dtype, shape, offsets, extent, file, start, length, crc32c
type ChunkRow = (String, String, String, Vec<i64>, Vec<i64>, Vec<i64>, String, u64, u64, u32);

fn file_row(file: &FileRecord) -> FileRow {
    let (crc, header_crc) = (file.crc32c.clone(), file.header_crc32c.clone());
    (file.path.clone(), file.size_bytes, crc, file.header_bytes, header_crc, file.rank)
}

fn file_record(row: FileRow) -> FileRecord {
    let (path, size_bytes, crc32c, header_bytes, header_crc32c, rank) = row;
    FileRecord { path, size_bytes, crc32c, header_bytes, header_crc32c, rank }
}

fn chunk_row(c: &Chunk) -> ChunkRow {
    (
        c.path.clone(),
        c.entry.clone(),
        c.dtype.clone(),
        c.shape.clone(),
        c.offsets.clone(),
        c.extent.clone(),
        c.file.clone(),
        c.start,
        c.length,
        c.crc32c,
    )
}

fn chunk(row: ChunkRow) -> Chunk {
    let (path, entry, dtype, shape, offsets, extent, file, start, length, crc32c) = row;
    let (flat, codec, step_ref) = (None, RAW_CODEC.into(), None);
    Chunk {
        path,
        entry,
        dtype,
        shape,
        offsets,
        extent,
        flat,
        file,
        start,
        length,
        crc32c,
        codec,
        step_ref,
    }
}

fn piece(row: PieceRow) -> Result<Piece, Error> {
    let (path, dtype, shape, offsets, extent) = row;
    let dtype = Dtype::named(&dtype)?;
    let rect = Rect { offsets, extent };
    let length = drivetrain::checkpoint::layout::shape_bytes(&rect.extent, dtype);
    let length = length.ok_or_else(|| {
        Error::invalid(format!("tensor {path}"), "an extent that fits", rect.describe())
    })?;
    Ok(Piece { path, dtype, shape, rect, length, source: 0, source_start: 0 })
}

/// Asks Python for the memory of one piece after the other.
struct Resolver<'a> {
    pieces: &'a [Piece],
    resolve: &'a Py<PyAny>,
    /// Number of the piece, its address, and what keeps it alive.
    held: Option<(usize, usize, Py<PyAny>)>,
    raised: Option<PyErr>,
}

impl Resolver<'_> {
    fn hold(&mut self, piece: usize) -> Result<usize, Error> {
        if let Some((held, address, _)) = &self.held
            && *held == piece
        {
            return Ok(*address);
        }
        self.held = None;
        let want = self.pieces[piece].length;
        let asked = Python::attach(|py| {
            let (address, length, alive) =
                self.resolve.call1(py, (piece,))?.extract::<(usize, u64, Py<PyAny>)>(py)?;
            Ok((address, length, alive))
        });
        let (address, length, alive) = asked.map_err(|e: PyErr| {
            let what = e.to_string();
            self.raised = Some(e);
            Error::Closed { what }
        })?;
        if length != want {
            let path = &self.pieces[piece].path;
            let expected = format!("{want} bytes as planned");
            return Err(Error::invalid(format!("tensor {path}"), expected, length));
        }
        self.held = Some((piece, address, alive));
        Ok(address)
    }
}

impl Feed for Resolver<'_> {
    fn fill<'a>(
        &'a mut self,
        piece: usize,
        at: u64,
        out: &'a mut [u8],
    ) -> LocalBoxFuture<'a, Result<(), Error>> {
        let filled = self.hold(piece).map(|address| {
            let from = (address + at as usize) as *const u8;
            // SAFETY: `resolve` gave the address of contiguous memory of exactly the piece's
            // length, which `held` keeps alive; `fill` is asked for ranges inside the piece only.
            unsafe { std::ptr::copy_nonoverlapping(from, out.as_mut_ptr(), out.len()) };
        });
        futures::future::ready(filled).boxed_local()
    }
}

/// A folder that becomes one checkpoint, written by ranks that the caller coordinates.
#[pyclass(frozen, module = "drivetrain._native")]
struct CheckpointFolder {
    inner: exchange::Folder,
}

#[pymethods]
impl CheckpointFolder {
    #[new]
    #[pyo3(signature = (uri, attempt, storage_options=None))]
    fn new(
        py: Python<'_>,
        uri: String,
        attempt: String,
        storage_options: Option<OptionMap>,
    ) -> PyResult<Self> {
        let options = storage(storage_options);
        let inner = py.detach(|| exchange::Folder::new(&uri, &options, &attempt));
        Ok(Self { inner: inner.map_err(|e| raise(&e))? })
    }

    /// Raises `AlreadyExists` if the folder is a checkpoint.
    fn refuse_committed(&self, py: Python<'_>) -> PyResult<()> {
        py.detach(|| self.inner.refuse_committed()).map_err(|e| raise(&e))
    }

    /// Writes a rank's pieces; `resolve(i)` gives (address, bytes, what keeps them alive) of piece
    /// i when its turn comes. Returns rows of its files and of its chunks.
    fn write_rank(
        &self,
        py: Python<'_>,
        rank: u32,
        pieces: Vec<PieceRow>,
        resolve: Py<PyAny>,
    ) -> PyResult<(Vec<FileRow>, Vec<ChunkRow>)> {
        let pieces = pieces.into_iter().map(piece).collect::<Result<Vec<_>, _>>();
        let pieces = pieces.map_err(|e| raise(&e))?;
        let mut raised = None;
        let written = py.detach(|| {
            let (resolve, held) = (&resolve, None);
            let mut feed = Resolver { pieces: &pieces, resolve, held, raised: None };
            let written = self.inner.write_rank(rank, &pieces, &mut feed);
            raised = feed.raised.take();
            written
        });
        let written = written.map_err(|e| raised.unwrap_or_else(|| raise(&e)))?;
        let files = written.files.iter().map(file_row).collect();
        Ok((files, written.chunks.iter().map(chunk_row).collect()))
    }

    /// Removes files of a save that failed.
    fn discard(&self, py: Python<'_>, files: Vec<FileRow>) -> PyResult<()> {
        let files: Vec<_> = files.into_iter().map(file_record).collect();
        py.detach(|| self.inner.discard(&files)).map_err(|e| raise(&e))
    }

    /// Writes the table of chunks, then commits.
    #[pyo3(signature = (step, world_size, files, chunks, state_json, *, overwrite))]
    #[allow(clippy::too_many_arguments, reason = "keyword arguments of the Python signature")]
    fn publish(
        &self,
        py: Python<'_>,
        step: i64,
        world_size: u32,
        files: Vec<FileRow>,
        chunks: Vec<ChunkRow>,
        state_json: String,
        overwrite: bool,
    ) -> PyResult<()> {
        let written = Written {
            files: files.into_iter().map(file_record).collect(),
            chunks: chunks.into_iter().map(chunk).collect(),
        };
        let per_rank_json = vec!["{}".to_string(); world_size as usize];
        let publication =
            Publication { step, world_size, written, state_json, per_rank_json, overwrite };
        py.detach(|| self.inner.publish(publication)).map_err(|e| raise(&e))
    }

    /// Stores a small note for the other ranks.
    fn put_note(&self, py: Python<'_>, name: &str, text: &str) -> PyResult<()> {
        py.detach(|| self.inner.put_note(name, text)).map_err(|e| raise(&e))
    }

    /// A note that `put_note` stored.
    fn note(&self, py: Python<'_>, name: &str) -> PyResult<String> {
        py.detach(|| self.inner.note(name)).map_err(|e| raise(&e))
    }

    /// Removes a note; a missing one is no error.
    fn remove_note(&self, py: Python<'_>, name: &str) -> PyResult<()> {
        py.detach(|| self.inner.remove_note(name)).map_err(|e| raise(&e))
    }
}

/// Name of an attempt folder that no other save has.
#[pyfunction]
fn fresh_attempt() -> String {
    exchange::fresh_attempt()
}

/// The step that a folder's name says, 0 if none.
#[pyfunction]
fn step_of_folder(uri: &str) -> i64 {
    exchange::step_of_folder(uri)
}

/// Opens a folder with a manifest directly inside.
#[pyfunction]
#[pyo3(signature = (uri, storage_options=None))]
fn open_checkpoint(
    py: Python<'_>,
    uri: String,
    storage_options: Option<OptionMap>,
) -> PyResult<OpenStep> {
    let options = storage(storage_options);
    let inner = py.detach(|| checkpoint::open_folder(&open_store(&uri, &options)?, ""));
    Ok(OpenStep { inner: inner.map_err(|e| raise(&e))? })
}

/// Rows of all chunks, tensor by tensor, each in the order of the table.
#[pyfunction]
fn checkpoint_chunks(step: &OpenStep) -> Vec<ChunkRow> {
    step.inner.tensors().flat_map(|(_, chunks)| chunks.iter().map(chunk_row)).collect()
}

/// Typed JSON of the plain value in a `torch.save` archive; None if it is not plain.
#[pyfunction]
fn plain_torch_value(py: Python<'_>, archive: &[u8]) -> Option<String> {
    py.detach(|| exchange::plain_torch_value(archive).ok())
}

/// Adds this file's classes and functions to the module.
pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<CheckpointFolder>()?;
    module.add_function(wrap_pyfunction!(fresh_attempt, module)?)?;
    module.add_function(wrap_pyfunction!(step_of_folder, module)?)?;
    module.add_function(wrap_pyfunction!(open_checkpoint, module)?)?;
    module.add_function(wrap_pyfunction!(checkpoint_chunks, module)?)?;
    module.add_function(wrap_pyfunction!(plain_torch_value, module)?)
}
