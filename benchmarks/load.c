/* The load generator: one thread, epoll, HTTP/1.1 over loopback, JSON on stdout.
 *
 * It exists because a producer append is a conversation: sequence n + 1 may leave
 * only after n was answered, and every connection has a producer id of its own.
 * A general tool keeps that state per thread, not per connection, so its sequences
 * arrive out of order. docs/benchmarks.md says more about the choice.
 *
 *   load append  PUT or POST in a closed loop, one request in flight per connection
 *   load read    follow Stream-Next-Offset to the tail over one connection, repeatedly
 *   load sse     many SSE readers of one stream and one writer at a fixed rate
 *   load respond answer every request with a fixed reply: the generator's own ceiling
 *
 * Every option is a pair "--name value". Times are nanoseconds inside, and
 * microseconds or seconds in the report. Only 127.0.0.1 is ever contacted.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#define HEAD_BYTES_MAX 16384
#define RECEIVE_BYTES (1 << 20)
#define EVENTS_MAX 512
#define ERRORS_MAX 1000
#define CONNECTIONS_MAX 20000
#define MESSAGES_MAX 1000000
#define NS 1000000000ull

static void fail(const char *what) {
    fprintf(stderr, "load: %s%s%s\n", what, errno ? ": " : "", errno ? strerror(errno) : "");
    exit(2);
}

static uint64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * NS + (uint64_t)t.tv_nsec;
}

static double cpu_seconds(void) {
    struct rusage u;
    getrusage(RUSAGE_SELF, &u);
    return (double)(u.ru_utime.tv_sec + u.ru_stime.tv_sec) +
           (double)(u.ru_utime.tv_usec + u.ru_stime.tv_usec) / 1e6;
}

/* ---- options ---------------------------------------------------------------- */

static int option_count;
static char **option_list;

static const char *option(const char *name, const char *fallback) {
    for (int i = 2; i + 1 < option_count; i += 2)
        if (!strncmp(option_list[i], "--", 2) && !strcmp(option_list[i] + 2, name)) return option_list[i + 1];
    if (!fallback) {
        errno = 0;
        fprintf(stderr, "load: --%s is needed\n", name);
        exit(2);
    }
    return fallback;
}

static double number(const char *name, const char *fallback) { return atof(option(name, fallback)); }

/* ---- histogram: 32 steps per power of two, so a quantile is within 3.2% ------ */

typedef struct {
    uint64_t counts[64 * 64];
    uint64_t total, max, sum;
} Histogram;

static void record(Histogram *h, uint64_t ns) {
    uint32_t power = ns < 64 ? 0 : (uint32_t)(63 - __builtin_clzll(ns)) - 5;
    h->counts[power * 64 + (ns >> power) % 64]++;
    h->total++;
    h->sum += ns;
    if (ns > h->max) h->max = ns;
}

static double quantile_us(const Histogram *h, double q) {
    uint64_t want = (uint64_t)(q * (double)h->total), seen = 0;
    for (uint32_t i = 0; i < 64 * 64; i++) {
        seen += h->counts[i];
        /* The upper edge of the step, never more than what was really seen. */
        if (seen > want) {
            uint64_t edge = (uint64_t)(i % 64 + 1) << (i / 64);
            return (double)(edge < h->max ? edge : h->max) / 1e3;
        }
    }
    return (double)h->max / 1e3;
}

static void print_latency(const char *name, const Histogram *h) {
    printf("\"%s\": {\"count\": %" PRIu64 ", \"mean_us\": %.1f, \"p50_us\": %.1f, \"p90_us\": %.1f, "
           "\"p99_us\": %.1f, \"p999_us\": %.1f, \"max_us\": %.1f}",
           name, h->total, h->total ? (double)h->sum / (double)h->total / 1e3 : 0.0, quantile_us(h, 0.5),
           quantile_us(h, 0.9), quantile_us(h, 0.99), quantile_us(h, 0.999), (double)h->max / 1e3);
}

/* ---- one HTTP message at a time, fed as bytes arrive -------------------------- */

enum { HEAD, FIXED, CHUNK_SIZE, CHUNK_DATA, CHUNK_END, TRAILER, UNTIL_CLOSE };

typedef struct Connection Connection;
struct Connection {
    int fd, index;
    bool busy, writing, ready;
    /* what is being sent: a head of our own and a body that may be shared */
    char out_head[2048];
    struct iovec out[2];
    int out_parts;
    /* what is being parsed */
    int state, status, line_bytes;
    char head[HEAD_BYTES_MAX];
    size_t head_bytes, left;
    uint64_t body_bytes;
    bool up_to_date, closing, is_get;
    char next_offset[256];
    /* append */
    uint64_t sent_ns, issued, limit, cursor;
    uint32_t stream, seq;
    /* sse */
    uint64_t mark;
    int mark_digits;
    uint64_t delivered;
};

static int poller;
static char receive_buffer[RECEIVE_BYTES];
static bool requests_are_parsed; /* the responder reads requests, the rest read replies */
static void (*on_head)(Connection *);
static void (*on_body)(Connection *, const char *, size_t);
static void (*on_end)(Connection *);
static uint64_t errors, reconnects;

static const char *header(const char *line, const char *name) {
    size_t n = strlen(name);
    if (strncasecmp(line, name, n) || line[n] != ':') return NULL;
    line += n + 1;
    while (*line == ' ' || *line == '\t') line++;
    return line;
}

static void parse_head(Connection *c) {
    bool chunked = false, fixed = false;
    c->left = 0;
    c->body_bytes = 0;
    c->up_to_date = c->closing = false;
    c->is_get = !strncmp(c->head, "GET ", 4);
    c->status = requests_are_parsed ? 0 : atoi(c->head + 9);
    for (char *line = strstr(c->head, "\r\n"); line && line[2] != '\r' && line[2]; line = strstr(line, "\r\n")) {
        const char *value;
        line += 2;
        switch (*line | 0x20) {
            case 'c':
                if ((value = header(line, "content-length"))) c->left = strtoull(value, NULL, 10), fixed = true;
                else if ((value = header(line, "connection"))) c->closing = !strncasecmp(value, "close", 5);
                break;
            case 't':
                if ((value = header(line, "transfer-encoding"))) chunked = !strncasecmp(value, "chunked", 7);
                break;
            case 's':
                if ((value = header(line, "stream-up-to-date"))) c->up_to_date = !strncasecmp(value, "true", 4);
                else if ((value = header(line, "stream-next-offset"))) {
                    size_t n = strcspn(value, "\r\n");
                    if (n >= sizeof c->next_offset) fail("the server sent an overlong offset");
                    memcpy(c->next_offset, value, n);
                    c->next_offset[n] = 0;
                }
                break;
        }
    }
    if (chunked) c->state = CHUNK_SIZE, c->left = 0, c->line_bytes = 0;
    else if (fixed) c->state = FIXED;
    else if (requests_are_parsed || c->status == 204 || c->status == 304) c->state = FIXED;
    else c->state = UNTIL_CLOSE;
}

static void end_message(Connection *c) {
    c->state = HEAD;
    c->head_bytes = 0;
    on_end(c);
}

static void feed_body(Connection *c, const char *data, size_t n) {
    c->body_bytes += n;
    c->left -= n;
    if (on_body) on_body(c, data, n);
}

static int hex_digit(char x) {
    if (x >= '0' && x <= '9') return x - '0';
    x |= 0x20;
    return x >= 'a' && x <= 'f' ? x - 'a' + 10 : -1;
}

/* Bytes into the parser; false when they are not HTTP. */
static bool feed(Connection *c, const char *data, size_t n) {
    while (n || (c->state == FIXED && !c->left)) {
        size_t step;
        switch (c->state) {
            case HEAD: {
                /* The head is copied, so that it may arrive in pieces: look for its end
                 * from three bytes before the new part. */
                size_t from = c->head_bytes > 3 ? c->head_bytes - 3 : 0;
                step = HEAD_BYTES_MAX - 1 - c->head_bytes;
                if (step > n) step = n;
                if (!step) return false;
                memcpy(c->head + c->head_bytes, data, step);
                char *end = memmem(c->head + from, c->head_bytes + step - from, "\r\n\r\n", 4);
                if (!end) {
                    c->head_bytes += step;
                } else {
                    size_t used = (size_t)(end - c->head) + 4 - c->head_bytes;
                    c->head[c->head_bytes + used] = 0;
                    step = used;
                    parse_head(c);
                    if (on_head) on_head(c);
                }
                data += step, n -= step;
                break;
            }
            case FIXED:
                step = c->left < n ? c->left : n;
                if (step) feed_body(c, data, step);
                data += step, n -= step;
                if (!c->left) end_message(c);
                break;
            case CHUNK_SIZE:
                if (*data == '\n') {
                    if (!c->line_bytes) return false;
                    c->state = c->left ? CHUNK_DATA : TRAILER;
                    c->line_bytes = 0;
                } else if (*data != '\r') {
                    int digit = hex_digit(*data);
                    if (digit < 0 || ++c->line_bytes > 15) return false;
                    c->left = c->left * 16 + (size_t)digit;
                }
                data++, n--;
                break;
            case CHUNK_DATA:
                step = c->left < n ? c->left : n;
                feed_body(c, data, step);
                data += step, n -= step;
                if (!c->left) c->state = CHUNK_END;
                break;
            case CHUNK_END:
                if (*data == '\n') c->state = CHUNK_SIZE, c->left = 0, c->line_bytes = 0;
                data++, n--;
                break;
            case TRAILER:
                if (*data == '\n') {
                    if (!c->line_bytes) {
                        data++, n--;
                        end_message(c);
                        break;
                    }
                    c->line_bytes = 0;
                } else if (*data != '\r') {
                    c->line_bytes++;
                }
                data++, n--;
                break;
            case UNTIL_CLOSE:
                c->left = n;
                feed_body(c, data, n);
                n = 0;
                break;
        }
    }
    return true;
}

/* ---- sockets ------------------------------------------------------------------ */

static void watch(Connection *c, int how, bool writing) {
    struct epoll_event e = {.events = EPOLLIN | (writing ? EPOLLOUT : 0u), .data.ptr = c};
    if (epoll_ctl(poller, how, c->fd, &e)) fail("epoll_ctl");
    c->writing = writing;
}

static void adopt(Connection *c, int fd) {
    int one = 1;
    c->fd = fd;
    c->state = HEAD;
    c->head_bytes = 0;
    c->out_parts = 0;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    if (fcntl(fd, F_SETFL, O_NONBLOCK)) fail("fcntl");
    watch(c, EPOLL_CTL_ADD, false);
}

static void dial(Connection *c) {
    struct sockaddr_in to = {.sin_family = AF_INET,
                             .sin_port = htons((uint16_t)number("port", NULL)),
                             .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0) fail("socket");
    if (connect(fd, (struct sockaddr *)&to, sizeof to)) fail("the server does not accept connections");
    adopt(c, fd);
}

static bool flush(Connection *c) {
    while (c->out_parts) {
        struct iovec *first = c->out + 2 - c->out_parts;
        ssize_t n = writev(c->fd, first, c->out_parts);
        if (n < 0) {
            if (errno == EINTR) continue;
            if (errno != EAGAIN) return false;
            if (!c->writing) watch(c, EPOLL_CTL_MOD, true);
            return true;
        }
        for (; c->out_parts; first++, c->out_parts--) {
            if ((size_t)n < first->iov_len) {
                first->iov_base = (char *)first->iov_base + n;
                first->iov_len -= (size_t)n;
                break;
            }
            n -= (ssize_t)first->iov_len;
        }
    }
    if (c->writing) watch(c, EPOLL_CTL_MOD, false);
    return true;
}

/* Queue the head that stands in out_head and a body that must outlive the write. */
static bool transmit(Connection *c, size_t head_bytes, const char *body, size_t body_bytes) {
    c->out[0] = (struct iovec){c->out_head, head_bytes};
    c->out[1] = (struct iovec){(char *)body, body_bytes};
    c->out_parts = 2;
    return flush(c);
}

static bool receive(Connection *c) {
    /* One read per wake-up: epoll is level-triggered, and a fast server must not
     * keep the generator on one connection while the others wait. */
    ssize_t n = read(c->fd, receive_buffer, sizeof receive_buffer);
    if (n < 0) return errno == EAGAIN || errno == EINTR;
    if (!n) return false;
    return feed(c, receive_buffer, (size_t)n);
}

static Connection *connections_open(int n) {
    struct rlimit files;
    getrlimit(RLIMIT_NOFILE, &files);
    files.rlim_cur = files.rlim_max;
    setrlimit(RLIMIT_NOFILE, &files);
    errno = 0;
    if (n < 1 || n > CONNECTIONS_MAX) fail("the number of connections is out of bounds");
    Connection *all = calloc((size_t)n, sizeof *all);
    if (!all) fail("memory");
    for (int i = 0; i < n; i++) {
        all[i].index = i;
        all[i].fd = -1;
    }
    return all;
}

static int wait_events(struct epoll_event *events, int timeout_ms) {
    int n = epoll_wait(poller, events, EVENTS_MAX, timeout_ms);
    if (n < 0 && errno != EINTR) fail("epoll_wait");
    return n < 0 ? 0 : n;
}

/* ---- payloads ------------------------------------------------------------------ */

/* A body of `size` bytes per append: raw bytes, one JSON message, or a JSON array of
 * `batch` messages of `size` bytes each. Every JSON message holds exactly one '{', by
 * which a reader counts messages. */
static char *make_body(size_t size, int batch, bool json, size_t *bytes) {
    size_t total = json && batch > 1 ? (size_t)batch * (size + 1) + 1 : size;
    char *body = malloc(total + 1), *at = body;
    if (!body) fail("memory");
    if (!json) {
        for (size_t i = 0; i < size; i++) *at++ = (char)('!' + i * 7 % 90);
    } else {
        if (size < 8) fail("a JSON message has at least 8 bytes");
        for (int m = 0; m < batch; m++) {
            if (batch > 1) *at++ = m ? ',' : '[';
            memcpy(at, "{\"k\":\"", 6);
            for (size_t i = 6; i < size - 2; i++) at[i] = (char)('a' + i * 7 % 26);
            memcpy(at + size - 2, "\"}", 2);
            at += size;
        }
        if (batch > 1) *at++ = ']';
    }
    *bytes = (size_t)(at - body);
    return body;
}

/* ---- append -------------------------------------------------------------------- */

static struct {
    const char *method, *path, *type, *writer, *body;
    size_t body_bytes;
    bool producer, versioned, counting, random;
    uint64_t streams, connections, done, finished;
    uint32_t *seqs;
    uint64_t statuses[1000], random_state;
    Histogram latency;
} job;

static uint64_t next_random(void) {
    uint64_t x = job.random_state;
    x ^= x << 13, x ^= x >> 7, x ^= x << 17;
    return job.random_state = x;
}

/* Each connection owns the streams s with s % connections == index, so that one
 * stream has one producer and its sequence is never in flight twice. */
static uint32_t pick_stream(Connection *c) {
    uint64_t owned = job.streams / job.connections + ((uint64_t)c->index < job.streams % job.connections);
    uint64_t k = job.random ? next_random() % owned : c->cursor++ % owned;
    return (uint32_t)(k * job.connections + (uint64_t)c->index);
}

static void send_append(Connection *c, bool again) {
    if (!again) {
        if (c->limit && c->issued == c->limit) {
            c->busy = false;
            job.finished++;
            return;
        }
        c->issued++;
        if (job.streams > 1) c->stream = pick_stream(c);
        c->seq = job.streams > 1 ? job.seqs[c->stream] : job.seqs[c->index];
    }
    char *at = c->out_head, *end = at + sizeof c->out_head;
    at += snprintf(at, (size_t)(end - at), "%s %s", job.method, job.path);
    if (job.streams > 1) at += snprintf(at, (size_t)(end - at), "-%u", c->stream);
    at += snprintf(at, (size_t)(end - at),
                   " HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: %s\r\nContent-Length: %zu\r\n", job.type,
                   job.body_bytes);
    if (job.producer)
        at += snprintf(at, (size_t)(end - at), "Producer-Id: %s-%d\r\nProducer-Epoch: 0\r\nProducer-Seq: %u\r\n",
                       job.writer, c->index, c->seq);
    if (job.versioned)
        at += snprintf(at, (size_t)(end - at), "If-Match: \"%" PRId64 "\"\r\n", (int64_t)c->seq - 1);
    at += snprintf(at, (size_t)(end - at), "\r\n");
    c->busy = true;
    c->sent_ns = now_ns();
    transmit(c, (size_t)(at - c->out_head), job.body, job.body_bytes);
}

static void append_answered(Connection *c) {
    job.seqs[job.streams > 1 ? c->stream : (uint32_t)c->index] = c->seq + 1;
    job.done++;
    if (job.counting) {
        record(&job.latency, now_ns() - c->sent_ns);
        job.statuses[c->status > 0 && c->status < 1000 ? c->status : 0]++;
    }
    if (!c->closing) send_append(c, false);
}

static void broken(Connection *c) {
    /* The same sequence goes out again on a new connection, as a real producer would
     * do it; a stored original then answers 204 and shows in the statuses. */
    close(c->fd);
    if (++errors > ERRORS_MAX) fail("too many broken connections");
    reconnects++;
    bool was_answered = c->closing && c->state == HEAD && !c->head_bytes;
    c->closing = false;
    dial(c);
    send_append(c, !was_answered);
}

static void run_append(void) {
    job.method = option("method", "POST");
    job.path = option("path", NULL);
    job.type = option("type", "application/octet-stream");
    job.writer = option("writer", "writer");
    job.producer = number("producer", "1") != 0;
    job.versioned = number("if-match", "0") != 0;
    job.random = number("random", "0") != 0;
    job.streams = (uint64_t)number("streams", "1");
    job.connections = (uint64_t)number("connections", "1");
    job.random_state = (uint64_t)number("seed", "88172645463325252");
    uint64_t count = (uint64_t)number("count", "0");
    size_t size = (size_t)number("size", "100");
    if (size) job.body = make_body(size, (int)number("batch", "1"), !strcmp(job.type, "application/json"), &job.body_bytes);
    else job.body = "";
    if (job.streams > 1 && job.streams < job.connections) fail("fewer streams than connections");
    uint64_t cells = job.streams > job.connections ? job.streams : job.connections;
    if (!(job.seqs = calloc(cells, sizeof *job.seqs))) fail("memory");

    Connection *all = connections_open((int)job.connections);
    uint64_t active = 0;
    for (uint64_t i = 0; i < job.connections; i++) {
        if (count && !(all[i].limit = count / job.connections + (i < count % job.connections))) continue;
        dial(&all[i]);
        active++;
    }
    uint64_t start = now_ns(), seconds = (uint64_t)(number("seconds", "5") * 1e9);
    uint64_t counting_from = count ? start : start + (uint64_t)(number("warmup", "0") * 1e9);
    uint64_t until = counting_from + seconds, progress = start;
    on_end = append_answered;
    job.counting = count > 0;
    double cpu = cpu_seconds();
    for (uint64_t i = 0; i < job.connections; i++)
        if (all[i].fd >= 0) send_append(&all[i], false);

    struct epoll_event events[EVENTS_MAX];
    uint64_t now = start;
    while (now < until && job.finished < active) {
        int n = wait_events(events, 20);
        for (int i = 0; i < n; i++) {
            Connection *c = events[i].data.ptr;
            bool good = true;
            if (events[i].events & (EPOLLIN | EPOLLHUP | EPOLLERR)) good = receive(c) && !c->closing;
            if (good && events[i].events & EPOLLOUT) good = flush(c);
            if (good) continue;
            if (c->busy) broken(c);
            else close(c->fd);
        }
        now = now_ns();
        if (!job.counting && now >= counting_from) job.counting = true, counting_from = now, until = now + seconds, cpu = cpu_seconds();
        if (now - progress > NS / 5) {
            progress = now;
            fprintf(stderr, "progress %" PRIu64 "\n", job.done);
        }
    }
    double elapsed = (double)(now - counting_from) / 1e9;
    printf("{\"done\": %" PRIu64 ", \"answers\": %" PRIu64 ", \"seconds\": %.4f, \"rate\": %.1f, \"bytes\": %" PRIu64 ", ",
           job.done, job.latency.total, elapsed, (double)job.latency.total / elapsed, job.latency.total * job.body_bytes);
    printf("\"complete\": %s, \"broken\": %" PRIu64 ", \"cpu\": %.3f, \"statuses\": {",
           count && job.finished < active ? "false" : "true", errors, (cpu_seconds() - cpu) / elapsed);
    const char *comma = "";
    for (int i = 0; i < 1000; i++)
        if (job.statuses[i]) printf("%s\"%d\": %" PRIu64, comma, i, job.statuses[i]), comma = ", ";
    printf("}, ");
    print_latency("latency", &job.latency);
    printf("}\n");
}

/* ---- read ---------------------------------------------------------------------- */

static struct {
    bool verify, over;
    uint64_t bytes, braces, responses, largest;
} pass;

static void read_body(Connection *c, const char *data, size_t n) {
    (void)c;
    if (!pass.verify) return;
    uint64_t braces = 0;
    for (size_t i = 0; i < n; i++) braces += data[i] == '{';
    pass.braces += braces;
}

static void send_read(Connection *c, const char *offset) {
    int n = snprintf(c->out_head, sizeof c->out_head, "GET %s?offset=%s HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
                     option("path", NULL), offset);
    transmit(c, (size_t)n, "", 0);
}

static void read_answered(Connection *c) {
    errno = 0;
    if (c->status != 200) fail("a read was not answered 200");
    pass.responses++;
    pass.bytes += c->body_bytes;
    if (c->body_bytes > pass.largest) pass.largest = c->body_bytes;
    if (c->up_to_date) pass.over = true;
    else if (!c->body_bytes) fail("an empty answer that is not up to date");
    else send_read(c, c->next_offset);
}

static void run_pass(Connection *c, bool verify, uint64_t until) {
    struct epoll_event events[EVENTS_MAX];
    memset(&pass, 0, sizeof pass);
    pass.verify = verify;
    send_read(c, "-1");
    while (!pass.over) {
        errno = 0;
        if (now_ns() > until) fail("a catch-up pass took too long");
        for (int i = 0, n = wait_events(events, 20); i < n; i++) {
            errno = 0;
            if (events[i].events & EPOLLOUT) flush(c);
            if (!receive(c)) fail("the connection broke while reading");
        }
    }
}

static void run_read(void) {
    Connection *c = connections_open(1);
    on_body = read_body;
    on_end = read_answered;
    dial(c);
    uint64_t deadline = now_ns() + (uint64_t)(number("seconds-max", "120") * 1e9);
    /* The first pass is timed apart, the second counts messages and is not timed. */
    uint64_t first = now_ns();
    run_pass(c, false, deadline);
    first = now_ns() - first;
    run_pass(c, true, deadline);
    uint64_t expected = pass.bytes, braces = pass.braces, total = 0, passes = 0, fastest = UINT64_MAX;
    Histogram each = {0};
    double cpu = cpu_seconds();
    uint64_t start = now_ns(), until = start + (uint64_t)(number("seconds", "5") * 1e9), now = start;
    bool same = true;
    while (now < until || passes < 1) {
        uint64_t began = now;
        run_pass(c, false, deadline);
        now = now_ns();
        same = same && pass.bytes == expected;
        total += pass.bytes;
        passes++;
        record(&each, now - began);
        if (now - began < fastest) fastest = now - began;
        fprintf(stderr, "progress %" PRIu64 "\n", passes);
    }
    double elapsed = (double)(now - start) / 1e9;
    printf("{\"bytes\": %" PRIu64 ", \"braces\": %" PRIu64 ", \"passes\": %" PRIu64 ", \"same\": %s, ", expected, braces,
           passes, same ? "true" : "false");
    printf("\"first_mb_per_second\": %.1f, ", (double)expected / 1e6 / ((double)first / 1e9));
    printf("\"seconds\": %.4f, \"mb_per_second\": %.1f, \"best_mb_per_second\": %.1f, ", elapsed,
           (double)total / 1e6 / elapsed, (double)expected / 1e6 / ((double)fastest / 1e9));
    printf("\"responses\": %" PRIu64 ", \"largest\": %" PRIu64 ", \"cpu\": %.3f, ", pass.responses, pass.largest,
           (cpu_seconds() - cpu) / elapsed);
    print_latency("pass", &each);
    printf("}\n");
}

/* ---- sse ----------------------------------------------------------------------- */

static struct {
    uint64_t ready, dropped, sent, answered, refused, deliveries, strays, messages;
    uint64_t *due_ns, *answered_ns, *last_ns;
    uint32_t *seen;
    Histogram delivery, last, append;
    bool writer_busy;
} tail;

/* A message carries "@0000000123;" in its only string. The marker is searched in the
 * decoded body, so neither SSE framing nor HTTP chunking can hide or split it. */
static void scan_marks(Connection *c, const char *data, size_t n) {
    if (c->index == 0) return;
    uint64_t now = 0;
    for (size_t i = 0; i < n; i++) {
        char x = data[i];
        if (!c->mark_digits) {
            const char *at = memchr(data + i, '@', n - i);
            if (!at) return;
            i = (size_t)(at - data);
            c->mark_digits = 1;
            c->mark = 0;
        } else if (x >= '0' && x <= '9' && c->mark_digits <= 10) {
            c->mark = c->mark * 10 + (uint64_t)(x - '0');
            c->mark_digits++;
        } else {
            if (x == ';' && c->mark_digits == 11 && c->mark < tail.messages) {
                if (!now) now = now_ns();
                /* Order and exactness: the k-th mark of a reader is message k. */
                if (c->mark == c->delivered) {
                    c->delivered++;
                    tail.deliveries++;
                    tail.seen[c->mark]++;
                    tail.last_ns[c->mark] = now;
                    record(&tail.delivery, now - tail.due_ns[c->mark]);
                } else {
                    tail.strays++;
                }
            }
            c->mark_digits = 0;
        }
    }
}

static void tail_head(Connection *c) {
    if (c->index == 0 || c->ready) return;
    errno = 0;
    if (c->status != 200) fail("an SSE reader was not answered 200");
    c->ready = true;
    tail.ready++;
}

static void tail_answered(Connection *c) {
    if (c->index) {
        tail.dropped++;
        return;
    }
    uint64_t now = now_ns();
    if (c->status != 200) tail.refused++;
    tail.answered_ns[tail.answered] = now;
    record(&tail.append, now - tail.due_ns[tail.answered]);
    tail.answered++;
    tail.writer_busy = false;
}

static void send_tail(Connection *c, uint64_t due_ns) {
    static char body[128];
    int n = snprintf(body, sizeof body, "{\"m\":\"@%010" PRIu64 ";%*s\"}", tail.sent, 79, "");
    int h = snprintf(c->out_head, sizeof c->out_head,
                     "POST %s HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: %d\r\n"
                     "Producer-Id: writer\r\nProducer-Epoch: 0\r\nProducer-Seq: %" PRIu64 "\r\n\r\n",
                     option("path", NULL), n, tail.sent);
    tail.due_ns[tail.sent++] = due_ns;
    tail.writer_busy = true;
    transmit(c, (size_t)h, body, (size_t)n);
}

static void run_sse(void) {
    int readers = (int)number("readers", "200");
    double rate = number("rate", "20");
    tail.messages = (uint64_t)(rate * number("seconds", "5"));
    errno = 0;
    if (tail.messages < 1 || tail.messages > MESSAGES_MAX) fail("the number of messages is out of bounds");
    tail.due_ns = calloc(tail.messages, sizeof(uint64_t));
    tail.answered_ns = calloc(tail.messages, sizeof(uint64_t));
    tail.last_ns = calloc(tail.messages, sizeof(uint64_t));
    tail.seen = calloc(tail.messages, sizeof(uint32_t));
    if (!tail.due_ns || !tail.answered_ns || !tail.last_ns || !tail.seen) fail("memory");
    Connection *all = connections_open(readers + 1);
    on_head = tail_head;
    on_body = scan_marks;
    on_end = tail_answered;
    dial(&all[0]);
    uint64_t start = now_ns();
    for (int i = 1; i <= readers; i++) {
        dial(&all[i]);
        int n = snprintf(all[i].out_head, sizeof all[i].out_head,
                         "GET %s?offset=-1&live=sse HTTP/1.1\r\nHost: 127.0.0.1\r\nAccept: text/event-stream\r\n\r\n",
                         option("path", NULL));
        transmit(&all[i], (size_t)n, "", 0);
    }
    struct epoll_event events[EVENTS_MAX];
    uint64_t connected = 0, interval = (uint64_t)(1e9 / rate), due = 0, grace = 0;
    double cpu = 0;
    for (;;) {
        uint64_t now = now_ns();
        if (!connected && tail.ready == (uint64_t)readers) {
            connected = now;
            due = now + NS / 5;
            cpu = cpu_seconds();
        }
        errno = 0;
        if (!connected && now - start > 30 * NS) fail("the SSE readers did not connect within 30 s");
        /* A message is due on schedule whether or not the last one was answered: its
         * latency counts from then, so a stalled server cannot hide its stall. */
        if (connected && tail.sent < tail.messages && !tail.writer_busy && now >= due) {
            send_tail(&all[0], due);
            due += interval;
        }
        if (tail.sent == tail.messages) {
            if (!grace) grace = now + 10 * NS;
            if (tail.deliveries == tail.messages * (uint64_t)readers && tail.answered == tail.messages) break;
            if (now > grace) break;
        }
        if (connected && now > connected + (uint64_t)(number("seconds", "5") * 1e9) + 30 * NS) break;
        int wait_ms = 20;
        if (connected && tail.sent < tail.messages && !tail.writer_busy)
            wait_ms = due > now ? (int)((due - now) / 1000000) : 0;
        for (int i = 0, n = wait_events(events, wait_ms > 20 ? 20 : wait_ms); i < n; i++) {
            Connection *c = events[i].data.ptr;
            errno = 0;
            if (events[i].events & EPOLLOUT && !flush(c)) fail("a connection broke while writing");
            if (events[i].events & (EPOLLIN | EPOLLHUP | EPOLLERR) && !receive(c)) {
                if (!c->index) fail("the writer's connection broke");
                tail.dropped++;
                close(c->fd);
            }
        }
    }
    double elapsed = (double)(now_ns() - connected) / 1e9;
    uint64_t whole = 0;
    for (uint64_t m = 0; m < tail.sent; m++)
        if (tail.seen[m] == (uint32_t)readers) {
            whole++;
            record(&tail.last, tail.last_ns[m] - tail.due_ns[m]);
        }
    printf("{\"readers\": %d, \"messages\": %" PRIu64 ", \"expected\": %" PRIu64 ", \"deliveries\": %" PRIu64
           ", \"reached_all\": %" PRIu64 ", \"strays\": %" PRIu64 ", \"dropped\": %" PRIu64 ", \"refused\": %" PRIu64 ", ",
           readers, tail.messages, tail.messages * (uint64_t)readers, tail.deliveries, whole, tail.strays, tail.dropped,
           tail.refused);
    printf("\"rate\": %.1f, \"connect_seconds\": %.4f, \"seconds\": %.4f, \"cpu\": %.3f, ", rate,
           (double)(connected - start) / 1e9, elapsed, (cpu_seconds() - cpu) / elapsed);
    print_latency("delivery", &tail.delivery);
    printf(", ");
    print_latency("last_reader", &tail.last);
    printf(", ");
    print_latency("append", &tail.append);
    printf("}\n");
}

/* ---- respond ------------------------------------------------------------------- */

static char *reply_body;
static size_t reply_bytes;

static void respond(Connection *c) {
    int n = snprintf(c->out_head, sizeof c->out_head,
                     "HTTP/1.1 200 OK\r\nStream-Next-Offset: 0000000000000001_0000000000000100\r\nProducer-Epoch: 0\r\n"
                     "Producer-Seq: 0\r\n%sContent-Length: %zu\r\n\r\n",
                     c->is_get ? "Stream-Up-To-Date: true\r\n" : "", c->is_get ? reply_bytes : 0);
    transmit(c, (size_t)n, reply_body, c->is_get ? reply_bytes : 0);
}

static void run_respond(void) {
    int connections = 0, one = 1;
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t at_bytes = sizeof at;
    int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    if (bind(listener, (struct sockaddr *)&at, sizeof at) || listen(listener, 1024)) fail("listen");
    if (getsockname(listener, (struct sockaddr *)&at, &at_bytes)) fail("getsockname");
    reply_bytes = (size_t)number("reply", "1048576");
    if (!(reply_body = calloc(1, reply_bytes + 1))) fail("memory");
    requests_are_parsed = true;
    on_end = respond;
    Connection *all = connections_open(CONNECTIONS_MAX);
    Connection door = {.fd = listener};
    watch(&door, EPOLL_CTL_ADD, false);
    printf("the responder is listening on http://127.0.0.1:%d\n", ntohs(at.sin_port));
    fflush(stdout);
    struct epoll_event events[EVENTS_MAX];
    uint64_t until = now_ns() + (uint64_t)(number("seconds", "120") * 1e9);
    while (now_ns() < until) {
        for (int i = 0, n = wait_events(events, 100); i < n; i++) {
            Connection *c = events[i].data.ptr;
            if (c == &door) {
                int fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
                if (fd >= 0 && connections < CONNECTIONS_MAX) adopt(&all[connections++], fd);
                continue;
            }
            bool good = true;
            if (events[i].events & EPOLLOUT) good = flush(c);
            if (good && events[i].events & (EPOLLIN | EPOLLHUP | EPOLLERR)) good = receive(c);
            if (!good) close(c->fd);
        }
    }
}

int main(int argc, char **argv) {
    option_count = argc;
    option_list = argv;
    const char *what = argc > 1 ? argv[1] : "";
    if ((poller = epoll_create1(EPOLL_CLOEXEC)) < 0) fail("epoll_create1");
    if (!strcmp(what, "append")) run_append();
    else if (!strcmp(what, "read")) run_read();
    else if (!strcmp(what, "sse")) run_sse();
    else if (!strcmp(what, "respond")) run_respond();
    else fail("use: load append|read|sse|respond --name value ...");
    return 0;
}
