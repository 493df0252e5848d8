//! The compiler from graph, plan and topology to a Program, and the Timeline.
