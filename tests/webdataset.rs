//! WebDataset tars.
