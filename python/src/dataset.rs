//! Dataset: the sample table with natural forms read on demand.

use std::path::PathBuf;

use drivetrain::index::{self, FieldSpec, SampleTable};
use drivetrain::storage::{OptionMap, StorageOptions};
use drivetrain::{Error, Result};
use parking_lot::Mutex;
use pyo3::IntoPyObjectExt;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::arrow::stream_capsule;
use crate::errors::to_python;
use crate::sample::SampleReader;
use crate::values::{Object, to_object};

/// Native half of `drivetrain.Dataset`: a table and the store its sources lie in.
#[pyclass(frozen, module = "drivetrain._native", name = "Dataset")]
pub struct NativeDataset {
    table: SampleTable,
    options: StorageOptions,
    reader: Mutex<Option<(u32, SampleReader)>>,
}

impl NativeDataset {
    fn new(table: SampleTable, options: StorageOptions) -> Self {
        Self { table, options, reader: Mutex::new(None) }
    }

    /// The table, for the loader.
    #[allow(dead_code, reason = "the loader's")]
    pub fn table(&self) -> &SampleTable {
        &self.table
    }

    /// Options of the store, for the loader. Their values are secrets.
    #[allow(dead_code, reason = "the loader's")]
    pub fn options(&self) -> &StorageOptions {
        &self.options
    }

    /// The reader of this process: a forked child must not use its parent's files and threads.
    fn reader(&self) -> Result<SampleReader> {
        let pid = std::process::id();
        let mut slot = self.reader.lock();
        if let Some((owner, reader)) = slot.as_ref()
            && *owner == pid
        {
            return Ok(reader.clone());
        }
        let reader = SampleReader::open(self.table.clone(), &self.options)?;
        if let Some((_, parents)) = slot.replace((pid, reader.clone())) {
            // Closing it would wait for threads that do not exist in this process.
            std::mem::forget(parents);
        }
        Ok(reader)
    }
}

/// (name, kind, frame, columns, extra) of a field.
type FieldTuple = (String, &'static str, Option<String>, Vec<String>, Vec<(String, String)>);

fn field_tuple(spec: &FieldSpec) -> FieldTuple {
    let extra = spec.extra.iter().map(|(k, v)| (k.clone(), v.clone())).collect();
    let (name, frame) = (spec.name.clone(), spec.frame.clone());
    (name, spec.kind.name(), frame, spec.columns.clone(), extra)
}

#[pymethods]
impl NativeDataset {
    fn __len__(&self) -> usize {
        self.table.len()
    }

    /// (name, kind, frame, columns, extra) of every field.
    fn fields(&self) -> Vec<FieldTuple> {
        self.table.fields().iter().map(field_tuple).collect()
    }

    #[getter]
    fn fingerprint(&self) -> &str {
        self.table.fingerprint()
    }

    #[getter]
    fn root(&self) -> &str {
        self.table.root()
    }

    #[getter]
    fn format(&self) -> &str {
        self.table.format()
    }

    #[getter]
    fn index_path(&self) -> Option<PathBuf> {
        self.table.path().map(std::path::Path::to_path_buf)
    }

    /// Rows of the index file, if this is a selection.
    #[getter]
    fn rows(&self) -> Option<Vec<u64>> {
        self.table.rows().map(<[u64]>::to_vec)
    }

    #[getter]
    fn storage_options(&self) -> OptionMap {
        self.options.options.clone()
    }

    /// (key, scene, timestamp_ns) of a row.
    fn head(&self, row: usize) -> (&str, &str, i64) {
        (self.table.key(row), self.table.scene(row), self.table.timestamp_ns(row))
    }

    /// Row of a key, or None.
    fn find(&self, py: Python<'_>, key: &str) -> Option<usize> {
        py.detach(|| self.table.find(key))
    }

    /// Tagged values of the named fields (all if None) of a row, in a dict.
    #[pyo3(signature = (row, fields = None))]
    fn sample(
        &self,
        py: Python<'_>,
        row: usize,
        fields: Option<Vec<String>>,
    ) -> PyResult<Py<PyDict>> {
        let values = py.detach(|| {
            let columns = self.columns(fields.as_deref())?;
            self.reader()?.read(row, &columns)
        });
        let dict = PyDict::new(py);
        for (name, value) in values.map_err(|e| to_python(py, &e))? {
            dict.set_item(name, to_object(py, value)?)?;
        }
        Ok(dict.unbind())
    }

    /// The samples at `rows`, in that order.
    fn select(&self, py: Python<'_>, rows: Vec<u64>) -> PyResult<Self> {
        let table = py.detach(|| self.table.select(&rows)).map_err(|e| to_python(py, &e))?;
        Ok(Self::new(table, self.options.clone()))
    }

    /// The table by the Arrow C stream interface.
    #[pyo3(signature = (requested_schema = None))]
    fn __arrow_c_stream__(
        &self,
        py: Python<'_>,
        requested_schema: Option<Object>,
    ) -> PyResult<Object> {
        // The protocol lets a producer ignore the wish, which is always "as it is" here.
        let _ = requested_schema;
        let batch = py.detach(|| self.table.batch()).map_err(|e| to_python(py, &e))?;
        stream_capsule(py, batch)?.into_py_any(py)
    }
}

impl NativeDataset {
    fn columns(&self, names: Option<&[String]>) -> Result<Vec<usize>> {
        let Some(names) = names else { return Ok((0..self.table.fields().len()).collect()) };
        let column = |name: &String| {
            self.table.field(name).ok_or_else(|| {
                let known: Vec<&str> =
                    self.table.fields().iter().map(|f| f.name.as_str()).collect();
                Error::NotFound {
                    what: format!("field {name}"),
                    advice: format!("the data set has {}", known.join(", ")),
                }
            })
        };
        names.iter().map(column).collect()
    }
}

fn storage_options(options: Option<OptionMap>) -> StorageOptions {
    StorageOptions { options: options.unwrap_or_default() }
}

/// Opens an index file.
#[pyfunction]
#[pyo3(signature = (path, root = None, storage_options = None))]
fn open_index(
    py: Python<'_>,
    path: PathBuf,
    root: Option<&str>,
    storage_options: Option<OptionMap>,
) -> PyResult<NativeDataset> {
    let table = py.detach(|| SampleTable::open(&path, root)).map_err(|e| to_python(py, &e))?;
    Ok(NativeDataset::new(table, self::storage_options(storage_options)))
}

/// Opens a data set, making its index if there is none or it is out of date.
#[pyfunction]
#[pyo3(signature = (uri, format = "auto", index = None, storage_options = None))]
fn open_dataset(
    py: Python<'_>,
    uri: &str,
    format: &str,
    index: Option<PathBuf>,
    storage_options: Option<OptionMap>,
) -> PyResult<NativeDataset> {
    let options = self::storage_options(storage_options);
    let table = py
        .detach(|| index::open_dataset(uri, format, index.as_deref(), &options))
        .map_err(|e| to_python(py, &e))?;
    Ok(NativeDataset::new(table, options))
}

/// Builds an index, writes it to `out` if given, and opens it.
#[pyfunction]
#[pyo3(signature = (uri, out = None, format = "auto", storage_options = None))]
fn build_index(
    py: Python<'_>,
    uri: &str,
    out: Option<PathBuf>,
    format: &str,
    storage_options: Option<OptionMap>,
) -> PyResult<NativeDataset> {
    let options = self::storage_options(storage_options);
    let table = py
        .detach(|| index::build_index(uri, format, out.as_deref(), &options, &()))
        .map_err(|e| to_python(py, &e))?;
    Ok(NativeDataset::new(table, options))
}

/// Adds this file's class and functions to the module.
pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<NativeDataset>()?;
    module.add_function(wrap_pyfunction!(open_index, module)?)?;
    module.add_function(wrap_pyfunction!(open_dataset, module)?)?;
    module.add_function(wrap_pyfunction!(build_index, module)?)
}
