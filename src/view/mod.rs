//! A sample as a person looks at it: one HTML page with its pictures, LiDAR points and boxes drawn
//! into them, and the scene from above. The page needs nothing but itself.
//!
//! Points and boxes go sensor → ego → global → ego at the camera's time → camera, with named
//! frames, so that a page can only show geometry whose frames meet.

mod above;
mod camera;
mod html;
mod legend;
mod scene;

use crate::error::{Error, Result};
use crate::index::{BlobReader, SampleTable};
use crate::storage::StorageOptions;

/// The page of the sample with `key`.
pub fn page(table: &SampleTable, key: &str, options: &StorageOptions) -> Result<String> {
    let row = table.find(key).ok_or_else(|| Error::NotFound {
        what: format!("sample {key}"),
        advice: "`drivetrain info URI` shows the first keys; a number is a row".into(),
    })?;
    page_of_row(table, row, options)
}

/// The page of the sample in `row`.
pub fn page_of_row(table: &SampleTable, row: usize, options: &StorageOptions) -> Result<String> {
    let mut reader = BlobReader::new(table, options)?;
    let scene = scene::Scene::read(table, row, &mut reader)?;
    Ok(html::page(&scene))
}

#[cfg(test)]
mod tests;
