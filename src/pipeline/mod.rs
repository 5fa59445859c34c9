//! Plan → fetch → decode into the batch slot → deliver in order, bounded in bytes.
