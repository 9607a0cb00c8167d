"""The HTTP/1.1 front end: connections, requests and answers. It knows no handler."""
