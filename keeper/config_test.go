package keeper

import (
	"testing"
	"time"
)

func TestAWindowIsOpenFromItsBeginningForItsLength(t *testing.T) {
	for _, c := range []struct {
		name, window string
		length       time.Duration
		at           string
		open         bool
	}{
		{"before it", "0 2 * * 6", time.Hour, "2030-01-05T01:59:59Z", false},
		{"at its beginning", "0 2 * * 6", time.Hour, "2030-01-05T02:00:00Z", true},
		{"in its last second", "0 2 * * 6", time.Hour, "2030-01-05T02:59:59Z", true},
		{"at its end", "0 2 * * 6", time.Hour, "2030-01-05T03:00:00Z", false},
		{"on another day", "0 2 * * 6", time.Hour, "2030-01-06T02:30:00Z", false},
		{"in UTC, wherever the clock is", "0 2 * * 6", time.Hour, "2030-01-05T03:30:00+01:00", true},
		{"beyond midnight", "30 23 * * *", time.Hour, "2030-01-05T00:15:00Z", true},
		{"after midnight", "30 23 * * *", time.Hour, "2030-01-05T00:30:00Z", false},
		{"beyond midnight on another day", "30 23 * * 6", time.Hour, "2030-01-05T00:15:00Z", false},
		{"in winter", "CRON_TZ=Europe/Zurich 0 2 * * *", time.Hour, "2030-01-05T01:30:00Z", true},
		{"in winter as in summer", "CRON_TZ=Europe/Zurich 0 2 * * *", time.Hour,
			"2030-01-05T00:30:00Z", false},
		{"in summer", "CRON_TZ=Europe/Zurich 0 2 * * *", time.Hour, "2030-07-05T00:30:00Z", true},
		{"over the day's 25th hour", "CRON_TZ=Europe/Zurich 0 1 * * *", 3 * time.Hour,
			"2030-10-27T01:59:59Z", true}, // the second 2:59 of the day
		{"three hours are three hours", "CRON_TZ=Europe/Zurich 0 1 * * *", 3 * time.Hour,
			"2030-10-27T02:00:00Z", false},
		{"over the hour that is left out", "CRON_TZ=Europe/Zurich 0 1 * * *", 2 * time.Hour,
			"2030-03-31T01:30:00Z", true}, // 3:30 of the day
		{"longer than its interval", "0 * * * *", 2 * time.Hour, "2030-01-05T02:30:00Z", true},
		{"on the 29th of February of another year", "0 2 29 2 *", time.Hour, "2031-03-01T02:30:00Z",
			false},
		{"when the next is in more than five years", "0 2 29 2 *", time.Hour, "2096-03-01T02:30:00Z",
			false},
	} {
		t.Run(c.name, func(t *testing.T) {
			w := try(ParseWindow(c.window, c.length))(t)
			if got := w.open(try(time.Parse(time.RFC3339, c.at))(t)); got != c.open {
				t.Errorf("%s is open at %s: %v", w, c.at, got)
			}
		})
	}
	if !(*Window)(nil).open(begin) {
		t.Error("without a window, operations do not begin")
	}
}
