//go:build !linux

package harness

import (
	"errors"
	"os"
	"syscall"
)

var errNotLinux = errors.New("the suite makes and mounts loop devices, which requires Linux: " +
	"run it there")

func checkSystem() error                         { return errNotLinux }
func programAttr() *syscall.SysProcAttr          { return nil }
func fitForRun(string) error                     { return errNotLinux }
func inMemory() []string                         { return nil }
func removeKilled()                              {}
func LockDir(string) (*os.File, error)           { return nil, errNotLinux }
func DeviceNumber(*os.File) (string, error)      { return "", errNotLinux }
func (r *Rack) Owns(*os.File) error              { return errNotLinux }
func StopLazyInit(string) error                  { return errNotLinux }
func (p *Plugin) LockVolumes() (*os.File, error) { return nil, errNotLinux }
