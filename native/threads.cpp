// The thread pool.
