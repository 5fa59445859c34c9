//! Descriptions of many whole tensors, made once: a save of the same tensors brings addresses only.

use drivetrain::Error;
use drivetrain::checkpoint::rects::Rect;
use drivetrain::checkpoint::{Target, TensorIn};
use parking_lot::Mutex;
use pyo3::prelude::*;

use crate::errors::to_python;

/// dtype, shape, bytes
type Kind = (String, Vec<i64>, usize);

/// Rows, and the addresses of their tensors now.
pub type Block = (Py<TensorRows>, Vec<usize>);

/// Whole tensors that every rank holds, without their memory.
#[pyclass(frozen, module = "drivetrain._native")]
pub struct TensorRows {
    rows: Mutex<Vec<TensorIn<'static>>>,
    bytes: Vec<usize>,
}

#[pymethods]
impl TensorRows {
    /// One row per path; `kind_of` is its place in `kinds` (dtype, shape, bytes), `pinned` are the
    /// rows that the first of `replicas` must write.
    #[new]
    fn new(
        py: Python<'_>,
        paths: Vec<String>,
        kind_of: Vec<usize>,
        kinds: Vec<Kind>,
        replicas: Vec<u32>,
        pinned: Vec<usize>,
    ) -> PyResult<Self> {
        if paths.len() != kind_of.len() || kind_of.iter().any(|&kind| kind >= kinds.len()) {
            let found = format!("{} paths, {} kinds of them", paths.len(), kind_of.len());
            return Err(to_python(py, &Error::invalid("rows", "a known kind per path", found)));
        }
        let bytes = kind_of.iter().map(|&kind| kinds[kind].2).collect();
        let row = |(path, &kind): (String, &usize)| {
            let (dtype, shape, _) = &kinds[kind];
            TensorIn {
                path,
                dtype: dtype.clone(),
                shape: shape.clone(),
                rect: Rect::whole(shape),
                data: &[],
                replicas: replicas.clone(),
                pin_rank: None,
            }
        };
        let mut rows: Vec<_> = paths.into_iter().zip(&kind_of).map(row).collect();
        for number in pinned {
            if let Some(row) = rows.get_mut(number) {
                row.pin_rank = replicas.first().copied();
            }
        }
        Ok(Self { rows: Mutex::new(rows), bytes })
    }

    fn __len__(&self) -> usize {
        self.bytes.len()
    }
}

impl TensorRows {
    fn check(&self, rows: &[TensorIn<'static>], addresses: &[usize]) -> Result<(), Error> {
        let complete = rows.len() == self.bytes.len() && addresses.len() == self.bytes.len();
        if complete && addresses.iter().all(|&address| address != 0) {
            return Ok(());
        }
        let expected = format!("{} addresses, and rows that nobody else uses", self.bytes.len());
        Err(Error::invalid("rows", expected, format!("{} and {}", addresses.len(), rows.len())))
    }

    /// The rows with their memory, until [`TensorRows::give_back`].
    ///
    /// # Safety
    /// Each address is of contiguous memory of its row's bytes, which stays alive and unchanged as
    /// long as the rows are lent.
    pub unsafe fn lend(&self, addresses: &[usize]) -> Result<Vec<TensorIn<'static>>, Error> {
        let mut kept = self.rows.lock();
        self.check(&kept, addresses)?;
        let mut rows = std::mem::take(&mut *kept);
        for ((row, &address), &bytes) in rows.iter_mut().zip(addresses).zip(&self.bytes) {
            // SAFETY: the caller's promise.
            row.data = unsafe { std::slice::from_raw_parts(address as *const u8, bytes) };
        }
        Ok(rows)
    }

    /// Ends the loan.
    pub fn give_back(&self, mut rows: Vec<TensorIn<'static>>) {
        for row in &mut rows {
            row.data = &[];
        }
        *self.rows.lock() = rows;
    }

    /// The rows as targets of a restore, which uses them up.
    ///
    /// # Safety
    /// Each address is of contiguous memory of its row's bytes that nobody else uses as long as the
    /// targets live.
    pub unsafe fn targets(&self, addresses: &[usize]) -> Result<Vec<Target<'static>>, Error> {
        let mut kept = self.rows.lock();
        self.check(&kept, addresses)?;
        let rows = std::mem::take(&mut *kept);
        let target = |((row, &address), &bytes): ((TensorIn<'static>, &usize), &usize)| {
            let TensorIn { path, dtype, shape, rect, .. } = row;
            // SAFETY: the caller's promise.
            let data = unsafe { std::slice::from_raw_parts_mut(address as *mut u8, bytes) };
            Target { path, dtype, shape, rect, data }
        };
        Ok(rows.into_iter().zip(addresses).zip(&self.bytes).map(target).collect())
    }
}

/// Calls `work` with the tensors of blocks, then `extra`.
pub fn with_rows<T>(
    blocks: &[Block],
    extra: Vec<TensorIn<'static>>,
    work: impl FnOnce(&[TensorIn<'_>]) -> Result<T, Error>,
) -> Result<T, Error> {
    let mut rows = Vec::new();
    let all_lent = blocks.iter().try_for_each(|(block, addresses)| {
        // SAFETY: the caller keeps this contiguous memory alive and unchanged until save returns;
        // before that the rows are given back.
        rows.push(unsafe { block.get().lend(addresses) }?);
        Ok(())
    });
    let counts: Vec<usize> = rows.iter().map(Vec::len).collect();
    let mut rows = rows.into_iter();
    let mut all = rows.next().unwrap_or_default();
    rows.for_each(|mut more| all.append(&mut more));
    all.extend(extra);
    let result = all_lent.and_then(|()| work(&all));
    let mut all = all.into_iter();
    for ((block, _), count) in blocks.iter().zip(counts) {
        block.get().give_back(all.by_ref().take(count).collect());
    }
    result
}

/// Adds this file's class to the module.
pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<TensorRows>()
}
