//go:build linux

package trace

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"runtime"
)

// Serve runs a tracer. It reads orders from in, one at a time, and writes reports to out.
func Serve(in io.Reader, out io.Writer) error {
	// The kernel allows only the thread that seized a process to control it.
	runtime.LockOSThread()
	orders, reports := json.NewDecoder(in), json.NewEncoder(out)
	for {
		var m message
		err := orders.Decode(&m)
		switch {
		case errors.Is(err, io.EOF):
			return nil
		case err != nil:
			return fmt.Errorf("read an order: %w", err)
		case m.Watch == nil:
			return errors.New("an order to release comes before an order to watch")
		}
		if err := watch(*m.Watch, orders, reports); err != nil {
			return err
		}
	}
}

// watch follows one process until it is released.
func watch(order Order, orders *json.Decoder, reports *json.Encoder) error {
	s, err := begin(order)
	if err != nil {
		return reports.Encode(Report{Error: err.Error()})
	}
	if err := reports.Encode(Report{}); err != nil {
		return fmt.Errorf("report: %w", err)
	}
	s.paused = func() error { return reports.Encode(Report{Paused: true}) }
	released := make(chan error, 1)
	go func() {
		var m message
		err := orders.Decode(&m)
		if err == nil && m.Resume {
			s.resume()
			m = message{}
			err = orders.Decode(&m)
		}
		s.release()
		s.resume()
		released <- err
	}()
	failed := s.run()
	if err := <-released; err != nil {
		return fmt.Errorf("read an order: %w", err)
	}
	if failed != nil {
		s.report.Error = failed.Error()
	}
	s.report.Over = true
	if err := reports.Encode(s.report); err != nil {
		return fmt.Errorf("report: %w", err)
	}
	return nil
}
