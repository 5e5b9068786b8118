package guest

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync/atomic"
	"time"
)

// Recording is the arguments of a running writer.
type Recording struct {
	Place Place
	// Pattern has the records. The writer ends after the last one.
	Pattern Pattern
	// Interval is the pause between two records.
	Interval time.Duration
}

// WriterEnd is the result of a writer.
type WriterEnd struct {
	// Acknowledged is the number of records that fsync acknowledged.
	Acknowledged int64
	// Failed is the reason why the writer ended before it was stopped, or "".
	Failed string
}

// writer appends records, one by one.
type writer struct {
	acknowledged atomic.Int64
	cancel       context.CancelFunc
	// done is closed when the writer has ended; err is its error then.
	done chan struct{}
	err  error
}

// StartWriter starts a writer and returns its number.
func (a *Agent) StartWriter(_ context.Context, r Recording) (int, error) {
	if err := r.Pattern.check(); err != nil {
		return 0, err
	}
	file, err := a.open(r.Place, openForWriting(r.Place))
	if err != nil {
		return 0, err
	}
	ctx, cancel := context.WithCancel(context.Background())
	w := &writer{cancel: cancel, done: make(chan struct{})}
	go func() {
		defer close(w.done)
		w.err = errors.Join(w.write(ctx, r, file), file.Close())
	}()
	a.mu.Lock()
	defer a.mu.Unlock()
	number := len(a.writers) + 1
	a.writers[number] = w
	return number, nil
}

// write appends records until it is stopped. It writes a record only when the one before is on
// the disk.
func (w *writer) write(ctx context.Context, r Recording, file *os.File) error {
	block := make([]byte, BlockBytes)
	timer := time.NewTimer(0)
	defer timer.Stop()
	for n := r.Pattern.First; n < r.Pattern.First+r.Pattern.Count; n++ {
		select {
		case <-ctx.Done():
			return nil
		case <-timer.C:
			timer.Reset(r.Interval)
		}
		r.Pattern.fill(block, n)
		if _, err := file.WriteAt(block, r.Pattern.offset(n)); err != nil {
			return fmt.Errorf("write record %d: %w", n, err)
		}
		if err := file.Sync(); err != nil {
			return fmt.Errorf("sync record %d: %w", n, err)
		}
		w.acknowledged.Add(1)
	}
	return nil
}

func (w *writer) stop() {
	w.cancel()
	<-w.done
}

func (a *Agent) writer(number int) (*writer, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	w := a.writers[number]
	if w == nil {
		return nil, fmt.Errorf("the agent has no writer %d", number)
	}
	return w, nil
}

// Acknowledged returns the number of a writer's records that fsync has acknowledged so far.
func (a *Agent) Acknowledged(_ context.Context, number int) (int64, error) {
	w, err := a.writer(number)
	if err != nil {
		return 0, err
	}
	return w.acknowledged.Load(), nil
}

// StopWriter stops a writer and returns its result.
func (a *Agent) StopWriter(_ context.Context, number int) (WriterEnd, error) {
	w, err := a.writer(number)
	if err != nil {
		return WriterEnd{}, err
	}
	w.stop()
	end := WriterEnd{Acknowledged: w.acknowledged.Load()}
	if w.err != nil {
		end.Failed = w.err.Error()
	}
	return end, nil
}
