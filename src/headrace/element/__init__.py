"""Elements: nested arrays, their structure and specs, batching arithmetic, the wire frame.

* `structure`: how an element is nested; flatten, unflatten, transpose.
* `tree`: what an element is; `normalize` turns what users return into one.
* `description`: structures and dtypes as plain values that travel.
* `spec`: the shapes and dtypes of an element's components.
* `stack`: elements to one stacked element and back.
* `chunk`: n elements, as rows or as columns; what flows between stages.
* `wire`: a chunk as a header and raw buffers.
"""
