//! Forks: what a process has that its children do not.

#[cfg(unix)]
use std::ffi::c_int;

/// Has `forked` called in every child that this process, or a child of it, is forked into from now on;
/// whether that could be arranged. It may do there only what does not wait for other threads. Process ids
/// would not tell: a child in a new namespace may have that of its parent.
#[cfg(unix)]
pub fn tell_children(forked: extern "C" fn()) -> bool {
    type Handler = Option<extern "C" fn()>;
    unsafe extern "C" {
        /// Has functions called before each fork, and after it in the parent and in the child.
        fn pthread_atfork(prepare: Handler, parent: Handler, child: Handler) -> c_int;
    }
    // SAFETY: a function lives as long as this library.
    unsafe { pthread_atfork(None, None, Some(forked)) == 0 }
}

/// Here no process is forked.
#[cfg(not(unix))]
pub fn tell_children(_: extern "C" fn()) -> bool {
    true
}
