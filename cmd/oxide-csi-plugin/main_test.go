package main

import (
	"bytes"
	"crypto/x509"
	"encoding/pem"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"syscall"
	"testing"
	"time"
)

// trustOf is an environment variable. With it, TestTheSystemsCertificatesTakePrecedence checks whom
// this process trusts: the certificates of the file that it names, or those in the binary if it is
// empty.
const trustOf = "TEST_TRUST_OF"

func TestTheSystemsCertificatesTakePrecedence(t *testing.T) {
	if path, asked := os.LookupEnv(trustOf); asked {
		trusts(t, path)
		return
	}
	server := httptest.NewTLSServer(http.NotFoundHandler())
	server.Close()
	authority := filepath.Join(t.TempDir(), "ca.pem")
	if err := os.WriteFile(authority, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE",
		Bytes: server.Certificate().Raw}), 0o600); err != nil {
		t.Fatal(err)
	}
	nowhere := filepath.Join(t.TempDir(), "missing")
	for _, test := range []struct{ name, file, trusted string }{
		{"an image of the binary alone trusts the binary's own", nowhere, ""},
		{"a system's are trusted alone", authority, authority},
	} {
		t.Run(test.name, func(t *testing.T) {
			cmd := exec.Command(os.Args[0], "-test.run=^TestTheSystemsCertificatesTakePrecedence$")
			cmd.Env = []string{"SSL_CERT_FILE=" + test.file, "SSL_CERT_DIR=" + nowhere,
				trustOf + "=" + test.trusted}
			if out, err := cmd.CombinedOutput(); err != nil {
				t.Errorf("%v\n%s", err, out)
			}
		})
	}
}

// trusts fails unless this process trusts exactly the authority in a file, or many authorities if
// no file is named.
func trusts(t *testing.T, path string) {
	t.Helper()
	pool, err := x509.SystemCertPool()
	if err != nil {
		t.Fatal(err)
	}
	want := x509.NewCertPool()
	if path == "" {
		if pool.Equal(want) {
			t.Error("nobody is trusted")
		}
		return
	}
	b, err := os.ReadFile(path)
	if err != nil || !want.AppendCertsFromPEM(b) {
		t.Fatal("no certificate: ", err)
	}
	if !pool.Equal(want) {
		t.Error("others are trusted too")
	}
}

// asProgram is an environment variable. With it this test binary is the program.
const asProgram = "TEST_AS_PROGRAM"

func TestMain(m *testing.M) {
	if os.Getenv(asProgram) != "" {
		main()
	}
	os.Exit(m.Run())
}

// program returns a command that runs the program in an empty directory, which it has for
// everything.
func program(t *testing.T, env ...string) (cmd *exec.Cmd, dir string, out, log *bytes.Buffer) {
	t.Helper()
	dir, err := os.MkdirTemp("", "plugin-") // its path is short enough for a socket
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	cmd, out, log = exec.Command(os.Args[0]), &bytes.Buffer{}, &bytes.Buffer{}
	cmd.Dir, cmd.Stdout, cmd.Stderr = dir, out, log
	cmd.Env = append([]string{asProgram + "=1", "HOME=" + dir, "TMPDIR=" + dir,
		"PATH=" + os.Getenv("PATH"), "CSI_ENDPOINT=unix://" + dir + "/csi.sock",
		"OXIDE_HOST=http://127.0.0.1:1", "OXIDE_TOKEN=oxide-token-x", "OXIDE_PROJECT=p",
		"OXIDE_CLUSTER_ID=c"}, env...)
	return cmd, dir, out, log
}

func names(t *testing.T, dir string) (names []string) {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names
}

func TestAProcessWritesToItsSocketAndItsStandardErrorOnly(t *testing.T) { // B-29, B-30
	cmd, dir, out, log := program(t, "OXIDE_MODE=controller", "OXIDE_LOG_LEVEL=debug")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	for end := time.Now().Add(20 * time.Second); ; <-time.After(10 * time.Millisecond) {
		conn, err := net.Dial("unix", filepath.Join(dir, "csi.sock"))
		if err == nil {
			_ = conn.Close()
			break
		}
		if time.Now().After(end) {
			_ = cmd.Process.Kill()
			t.Fatal(err)
		}
	}
	if got := names(t, dir); !slices.Equal(got, []string{"csi.sock"}) {
		t.Errorf("it has made %q", got)
	}
	if err := cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Wait(); err != nil || out.Len() > 0 || log.Len() == 0 || len(names(t, dir)) > 0 {
		t.Errorf("%v, on standard output %q, on standard error %q, left %q", err, out, log, names(t, dir))
	}
}
