// One thread that copies pieces of layers, in the order in which it is told to: a layer's copy off the device and the
// places where it is computed have the same layout, so that a copy is a list of offsets and a size.
//
// Each layer has a home, and may have a second copy that is nearer. Loads read the nearer one; what is written goes to
// both. Which memory that is, a job looks up when it runs, under a lock: a nearer copy can go at any time.

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <deque>
#include <mutex>
#include <thread>
#include <vector>

namespace {

using Clock = std::chrono::steady_clock;

int64_t now_ns() {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now().time_since_epoch()).count();
}

enum Kind : int { kLoad = 0, kWrite = 1, kFill = 2 };

struct Job {
    Kind kind;
    int64_t layer;
    char* place;
    std::vector<int64_t> offsets;
    int64_t piece_bytes;
    int64_t submitted_ns;
};

struct Copies {
    char* home = nullptr;
    char* near = nullptr;
};

struct Outcome {
    bool is_near;    // the nearer copy was read or written, too
    double bytes_s;  // of the modelled link that the job went over; 0 if it is not paced
};

enum Stat : int { kLoaded, kLoadNs, kWritten, kNearLoaded, kNearWritten, kNumStats };

void copy_pieces(char* to, const char* from, const std::vector<int64_t>& offsets, int64_t piece_bytes) {
    for (size_t first = 0; first < offsets.size();) {
        size_t end = first + 1;
        while (end < offsets.size() && offsets[end] == offsets[end - 1] + piece_bytes) ++end;
        std::memcpy(to + offsets[first], from + offsets[first], (end - first) * piece_bytes);
        first = end;
    }
}

class Line {
   public:
    explicit Line(int64_t num_layers) : copies_(num_layers), thread_([this] { run(); }) {}

    ~Line() {
        {
            std::lock_guard<std::mutex> lock(mutex_);
            is_closing_ = true;
        }
        changed_.notify_all();
        thread_.join();
    }

    int64_t submit(Job job) {
        int64_t ticket;
        {
            std::lock_guard<std::mutex> lock(mutex_);
            job.submitted_ns = now_ns();
            jobs_.push_back(std::move(job));
            ticket = ++num_submitted_;
        }
        changed_.notify_all();
        return ticket;
    }

    // Waits for a job, and until a modelled link would have carried it.
    void wait(int64_t ticket) {
        int64_t ready_ns;
        {
            std::unique_lock<std::mutex> lock(mutex_);
            changed_.wait(lock, [&] { return num_done_ >= ticket; });
            while (!ready_.empty() && ready_.front().first < ticket) ready_.pop_front();
            ready_ns = !ready_.empty() && ready_.front().first == ticket ? ready_.front().second : 0;
        }
        const int64_t left_ns = ready_ns - now_ns();
        if (left_ns > 0) std::this_thread::sleep_for(std::chrono::nanoseconds(left_ns));
    }

    // Returns when no job uses the copy that was there before.
    void place(int64_t layer, char* home, char* near) {
        std::lock_guard<std::mutex> lock(copies_mutex_);
        copies_[layer] = {home, near};
    }

    void pace(double home_bytes_s, double near_bytes_s) {
        std::lock_guard<std::mutex> lock(copies_mutex_);
        pace_[0] = home_bytes_s;
        pace_[1] = near_bytes_s;
    }

    void stats(int64_t* out) {
        std::lock_guard<std::mutex> lock(mutex_);
        std::memcpy(out, stats_, sizeof(stats_));
    }

   private:
    void run() {
        std::unique_lock<std::mutex> lock(mutex_);
        while (true) {
            changed_.wait(lock, [&] { return is_closing_ || !jobs_.empty(); });
            if (jobs_.empty()) return;
            Job job = std::move(jobs_.front());
            jobs_.pop_front();
            lock.unlock();
            const int64_t begin_ns = now_ns();
            const Outcome outcome = execute(job);
            const int64_t end_ns = now_ns();
            lock.lock();
            note(job, outcome, begin_ns, end_ns);
            changed_.notify_all();
        }
    }

    Outcome execute(const Job& job) {
        std::lock_guard<std::mutex> lock(copies_mutex_);
        const Copies& copies = copies_[job.layer];
        const bool is_near = copies.near != nullptr;
        if (job.kind == kLoad) {
            copy_pieces(job.place, is_near ? copies.near : copies.home, job.offsets, job.piece_bytes);
            return {is_near, pace_[is_near ? 1 : 0]};
        }
        if (job.kind == kWrite) copy_pieces(copies.home, job.place, job.offsets, job.piece_bytes);
        if (is_near) {
            copy_pieces(copies.near, job.kind == kWrite ? job.place : copies.home, job.offsets, job.piece_bytes);
        }
        return {is_near, job.kind == kFill && is_near ? pace_[0] : 0};  // a fill comes from home
    }

    void note(const Job& job, const Outcome& outcome, int64_t begin_ns, int64_t end_ns) {
        const int64_t num_bytes = static_cast<int64_t>(job.offsets.size()) * job.piece_bytes;
        const int64_t link_ns = outcome.bytes_s > 0 ? static_cast<int64_t>(num_bytes / outcome.bytes_s * 1e9) : 0;
        ++num_done_;
        if (outcome.bytes_s > 0) free_ns_ = (free_ns_ > job.submitted_ns ? free_ns_ : job.submitted_ns) + link_ns;
        if (job.kind != kLoad) {
            stats_[kWritten] += job.kind == kWrite ? num_bytes : 0;
            stats_[kNearWritten] += outcome.is_near ? num_bytes : 0;
            return;
        }
        if (outcome.bytes_s > 0) ready_.emplace_back(num_done_, free_ns_);
        const int64_t copied_ns = end_ns - begin_ns;
        stats_[kLoaded] += num_bytes;
        stats_[kLoadNs] += link_ns > copied_ns ? link_ns : copied_ns;
        stats_[kNearLoaded] += outcome.is_near ? num_bytes : 0;
    }

    std::mutex mutex_, copies_mutex_;
    std::condition_variable changed_;
    std::deque<Job> jobs_;
    std::vector<Copies> copies_;
    std::deque<std::pair<int64_t, int64_t>> ready_;  // (ticket, when a modelled link has carried it), in order
    double pace_[2] = {0, 0};
    int64_t num_submitted_ = 0, num_done_ = 0, free_ns_ = 0;
    int64_t stats_[kNumStats] = {};
    bool is_closing_ = false;
    std::thread thread_;
};

}  // namespace

#define API extern "C" __attribute__((visibility("default")))

API void* layer_line_open(int64_t num_layers) { return new Line(num_layers); }

API void layer_line_close(void* line) { delete static_cast<Line*>(line); }

API int64_t layer_line_submit(void* line, int kind, int64_t layer, void* place, const int64_t* offsets,
                              int64_t num_offsets, int64_t piece_bytes) {
    Job job{static_cast<Kind>(kind), layer, static_cast<char*>(place), {offsets, offsets + num_offsets}, piece_bytes, 0};
    return static_cast<Line*>(line)->submit(std::move(job));
}

API void layer_line_wait(void* line, int64_t ticket) { static_cast<Line*>(line)->wait(ticket); }

API void layer_line_place(void* line, int64_t layer, void* home, void* near) {
    static_cast<Line*>(line)->place(layer, static_cast<char*>(home), static_cast<char*>(near));
}

API void layer_line_pace(void* line, double home_bytes_s, double near_bytes_s) {
    static_cast<Line*>(line)->pace(home_bytes_s, near_bytes_s);
}

API void layer_line_stats(void* line, int64_t* out) { static_cast<Line*>(line)->stats(out); }
