//! Tables, plots and traces of Timelines.
