//! A JSON array of records, one record in memory at a time.

use std::fmt;
use std::io::{self, Read};
use std::marker::PhantomData;

use serde::de::{DeserializeOwned, Deserializer, Error as _, SeqAccess, Visitor};

use super::TABLE_RECORDS_MAX;
use crate::error::{Error, Result};

/// Calls `visit` for each record of the array that `reader` holds. serde_json limits nesting.
pub(super) fn records<T: DeserializeOwned>(
    table: &'static str,
    reader: impl Read,
    mut visit: impl FnMut(T) -> Result<()>,
) -> Result<()> {
    let mut failure = None;
    let mut json = serde_json::Deserializer::from_reader(reader);
    let visitor = Records { visit: &mut visit, failure: &mut failure, record: PhantomData };
    let result = json.deserialize_seq(visitor).and_then(|()| json.end());
    match (failure, result) {
        (Some(failure), _) => Err(failure),
        (None, Ok(())) => Ok(()),
        (None, Err(e)) => Err(json_error(table, &e)),
    }
}

fn json_error(table: &'static str, e: &serde_json::Error) -> Error {
    // An unreadable disk is not a malformed table; the message keeps the cause.
    let what = if e.is_io() { io::Error::other(e.to_string()).to_string() } else { e.to_string() };
    Error::Json { what: table, line: e.line() as u64, column: e.column() as u64, message: what }
}

struct Records<'a, T, F> {
    visit: &'a mut F,
    failure: &'a mut Option<Error>,
    record: PhantomData<T>,
}

impl<'de, T: DeserializeOwned, F: FnMut(T) -> Result<()>> Visitor<'de> for Records<'_, T, F> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an array of records")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<(), A::Error> {
        let mut count = 0;
        while let Some(record) = seq.next_element::<T>()? {
            count += 1;
            if count > TABLE_RECORDS_MAX {
                return Err(A::Error::custom(format!("more than {TABLE_RECORDS_MAX} records")));
            }
            if let Err(failure) = (self.visit)(record) {
                *self.failure = Some(failure);
                return Err(A::Error::custom("refused"));
            }
        }
        Ok(())
    }
}
