"""One direct test for each kind of bug report against hashes, cache keys and plugins of neighbouring projects.

Each test's name has the number of its kind. Most kinds are covered in more depth elsewhere in the tests; here, each is
stated once, on the real cache.
"""
