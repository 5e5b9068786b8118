package console

import (
	"bytes"
	"crypto/subtle"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"time"
)

// tokenHeader carries the token of a request that has no form.
const tokenHeader = "X-Console-Token"

// Guard refuses the requests that CheckPage refuses, and changes by a browser without the token of
// the console's pages. Other clients, such as curl, send no Origin and need no token. The requests
// that it passes on have been read to their end.
func (c *Console) Guard(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		header := w.Header()
		header.Set("X-Content-Type-Options", "nosniff")
		header.Set("Cross-Origin-Resource-Policy", "same-origin")
		err := CheckPage(r, c.Hosts, "--admin-host")
		var body []byte
		if err == nil {
			body, err = ReadBody(w, r, maxForm, c.BodyTime)
			r.Body = io.NopCloser(bytes.NewReader(body))
		}
		if err == nil {
			err = c.check(r)
		}
		if err != nil {
			http.Error(w, err.Error(), http.StatusForbidden)
			return
		}
		next.ServeHTTP(w, r)
	})
}

// maxForm limits the body of a request to the admin listener.
const maxForm = 1 << 20

// ReadBody reads up to limit bytes of a request's body and one more, within a time. If that is the
// whole body, it removes the deadline for later requests on the connection.
func ReadBody(w http.ResponseWriter, r *http.Request, limit int64, within time.Duration) ([]byte,
	error) {
	control := http.NewResponseController(w)
	_ = control.SetReadDeadline(time.Now().Add(within)) // a test's recorder has no deadlines
	body, err := io.ReadAll(io.LimitReader(r.Body, limit+1))
	switch {
	case err != nil:
		return nil, fmt.Errorf("read the body, for which there are %s: %w", within, err)
	case int64(len(body)) <= limit:
		_ = control.SetReadDeadline(time.Time{})
	}
	return body, nil
}

// CheckPage refuses requests that web pages of other origins send. A browser on the same machine
// can reach the listener, and the name of a page's host may resolve to the listener's address (DNS
// rebinding). So a name in Host must be localhost or one of hosts, to which the command-line flag
// adds, and an Origin must be the listener's own. A request that a browser marks as cross-site may
// only open a page.
func CheckPage(r *http.Request, hosts []string, flag string) error {
	if !ownHost(r.Host, hosts) {
		return fmt.Errorf("the request's Host is %q, and any name can be made to resolve to this "+
			"address: use localhost or the IP address of the listener, or start the simulator with "+
			"%s and the name", r.Host, flag)
	}
	scheme := "http://"
	if r.TLS != nil {
		scheme = "https://"
	}
	for _, o := range r.Header.Values("Origin") {
		if !strings.EqualFold(o, scheme+r.Host) {
			return fmt.Errorf("the request comes from a page of %q, expected one of %s%s", o, scheme,
				r.Host)
		}
	}
	site := r.Header.Get("Sec-Fetch-Site")
	opens := r.Method == http.MethodGet && r.Header.Get("Sec-Fetch-Dest") == "document"
	if !slices.Contains([]string{"", "none", "same-origin"}, site) && !opens {
		return fmt.Errorf("the request comes from a page of another site (Sec-Fetch-Site is %q), "+
			"expected one of %s%s", site, scheme, r.Host)
	}
	return nil
}

// check returns an error for a change by a browser without the token.
func (c *Console) check(r *http.Request) error {
	switch r.Method {
	case http.MethodGet, http.MethodHead, http.MethodOptions:
		return nil
	}
	ours := r.URL.Path == actionPath
	if r.Header.Get("Origin") == "" && r.Header.Get("Sec-Fetch-Site") == "" && !ours {
		return nil // no browser
	}
	token := r.Header.Get(tokenHeader)
	if token == "" && ours {
		token = r.PostFormValue("token")
	}
	if subtle.ConstantTimeCompare([]byte(token), []byte(c.Token)) != 1 {
		return fmt.Errorf("the request lacks the token of the console's pages: load the page again, " +
			"because the token is a new one each time that the simulator starts")
	}
	return nil
}

// ownHost reports whether a Host is an IP address, localhost or one of hosts, with or without a
// port.
func ownHost(host string, hosts []string) bool {
	name := host
	if bare, _, err := net.SplitHostPort(host); err == nil {
		name = bare
	}
	if slices.ContainsFunc(append([]string{"localhost"}, hosts...), func(own string) bool {
		return strings.EqualFold(own, name)
	}) {
		return true
	}
	_, err := netip.ParseAddr(strings.TrimSuffix(strings.TrimPrefix(name, "["), "]"))
	return err == nil
}
